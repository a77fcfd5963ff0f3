{{/* Of (list root name hooks weight): the head of a Job that runs as hooks. A Job that failed stays, with its log. */}}
{{- define "moiety.jobHead" -}}
{{- $root := index . 0 -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ include "moiety.fullname" $root }}-{{ index . 1 }}
  labels:
    {{- include "moiety.labels" (list $root (index . 1)) | nindent 4 }}
  annotations:
    helm.sh/hook: {{ index . 2 }}
    helm.sh/hook-weight: {{ index . 3 | quote }}
    helm.sh/hook-delete-policy: before-hook-creation
{{- end -}}

{{/* Of (list root name part): what the pods of Jobs have in common. */}}
{{- define "moiety.jobPod" -}}
{{- $root := index . 0 -}}
{{- $part := index . 2 -}}
metadata:
  labels:
    {{- include "moiety.podLabels" (list $root $part (index . 1)) | nindent 4 }}
    moiety.dev/part: job
  {{- with $part.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  {{- include "moiety.pod" (list $root $part (index . 1)) | nindent 2 }}
{{- end -}}
